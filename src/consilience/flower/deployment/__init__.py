"""Flower apps from config files: `app` builds both apps, `create` writes a new app, `gate` protects the SuperLink,
`certificates` makes the certificates of a federation, `node` starts a site."""

from consilience.flower.deployment.app import DeployedApp, deployment

__all__ = ["DeployedApp", "deployment"]
