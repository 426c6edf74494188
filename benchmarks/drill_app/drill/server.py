"""The server's half."""

import resource

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from consilience.core.logs import set_up_logs
from consilience.flower import serve
from drill.setting import METHODS, options, task

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run what the app's configuration says."""
    set_up_logs()
    serve(grid, METHODS[context.run_config["method"]], task(), **options(context.run_config))
    print(f"peak memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000:.0f} MB", flush=True)
