"""A command line that the server of forks parses: forks find its parser, and settled memory."""

import gc
import logging

from pl_fed.isolation import isolate
from pl_fed.studies.cell_configs import check_config

with isolate():
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)  # no line about the seed
    check_config(["--config", "quickstart", "--trainer.logger=false"])
gc.freeze()  # collections in forks leave out all that the server has imported
