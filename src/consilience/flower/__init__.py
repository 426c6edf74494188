"""Real federations over a network, through Flower: every client is a site with its own data.

In the order of one round: `app` has the server's Flower app and `serve`, which calls `fit` with the engine in
`session`. `site_app` is that of the sites. The `registry` stores which sites take part. `session` chooses the clients
of a round, and `exchange` makes one attempt at it: it builds the requests in `messages`, `coordinator` sends them to
the sites that are online, over Flower's grid in `transport`, and `client` answers them at the site, whose states
`storage` keeps on its disk. Then `updates` checks each update before it is fused, `states` records which state each
client now has, and `scores` collects the sites' scores. `policy` says what may leave a site. `activity` writes down
what the server sees of the sites, which `status` reads and `status_page` shows. `deployment` makes apps from config
files, and `loopback` runs a federation as processes on one machine.
"""

from importlib.util import find_spec

from consilience.core.errors import ConfigError

if find_spec("flwr") is None:
    raise ConfigError("real federations need Flower: pip install 'consilience[flower]'")

from consilience.flower.app import serve, server_app
from consilience.flower.coordinator import Participation
from consilience.flower.engine import Flower
from consilience.flower.site_app import client_app

__all__ = ["Flower", "Participation", "client_app", "serve", "server_app"]
