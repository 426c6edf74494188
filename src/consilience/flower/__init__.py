"""Real federations over a network, through Flower: every client is a site with data of its own."""

from consilience.flower.apps import client_app, serve, server_app
from consilience.flower.correspondence import Flower
from consilience.flower.office import Manners

__all__ = ["Flower", "Manners", "client_app", "serve", "server_app"]
