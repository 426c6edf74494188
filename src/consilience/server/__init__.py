"""Server optimisers: steps along the mean update."""

from consilience.server.optimizers import AdaGrad, Adam, Momentum, ServerOptimizer, Yogi

__all__ = ["AdaGrad", "Adam", "Momentum", "ServerOptimizer", "Yogi"]
