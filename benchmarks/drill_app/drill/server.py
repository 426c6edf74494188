"""The server's half."""

import logging
import resource

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from consilience.flower import serve
from drill.setting import METHODS, options, task

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run what the app's configuration says."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    serve(grid, METHODS[context.run_config["method"]], task(), **options(context.run_config))
    print(f"peak memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000:.0f} MB", flush=True)
