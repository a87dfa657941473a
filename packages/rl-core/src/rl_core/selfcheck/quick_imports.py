"""The first module that the process imports which ranks are forks of: see `rl_core.imports.without_collections`, whose
end is the beginning of each rank."""

import gc

gc.disable()
