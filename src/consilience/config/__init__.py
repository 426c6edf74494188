"""Config files: what they may say, and the objects that they describe."""

from consilience.config.build import LoadedConfig, LoadedDeployment
from consilience.config.files import read_config, read_deployment

__all__ = ["LoadedConfig", "LoadedDeployment", "read_config", "read_deployment"]
