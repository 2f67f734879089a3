"""What the server of forks imports and parses: forks find modules, a parser, and settled memory."""

import gc
import logging

from pl_fed.lazy_imports import quick_imports

with quick_imports():  # as the command line does: a third of the time
    import pytest  # noqa: F401 (the forks have it)
    import worlds  # noqa: F401

    import pl_fed.command.main
    import pl_fed.studies.cell_run  # noqa: F401
    from pl_fed.isolation import isolate
    from pl_fed.studies.cell_configs import check_config

with isolate():
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)  # no line about the seed
    check_config(["--config", "quickstart", "--trainer.logger=false"])
gc.freeze()  # collections in forks leave out all that the server has imported
