"""Flower apps from config files: `app` builds both apps, `create` writes a new app, `gate` protects the SuperLink."""

from consilience.flower.deployment.app import DeployedApp, deployment

__all__ = ["DeployedApp", "deployment"]
