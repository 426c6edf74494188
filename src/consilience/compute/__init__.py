"""One client's function for cohorts: vmap, the compiler, layers and kernels."""
