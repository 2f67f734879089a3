"""How the local steps of a chunk of clients are run."""

from pl_fed.engine.base import Chunk as Chunk
from pl_fed.engine.base import Clipping as Clipping
from pl_fed.engine.base import Engine as Engine
from pl_fed.engine.base import LocalSettings as LocalSettings
from pl_fed.engine.choice import EngineChoice as EngineChoice
from pl_fed.engine.choice import Task as Task
from pl_fed.engine.one_by_one import OneByOne as OneByOne
from pl_fed.engine.one_by_one_compiled import OneByOneCompiled as OneByOneCompiled
from pl_fed.engine.options import EngineName as EngineName
from pl_fed.engine.options import EngineOptions as EngineOptions
from pl_fed.engine.stacked import CannotStackError as CannotStackError
from pl_fed.engine.stacked import Stacked as Stacked
from pl_fed.engine.tracing import CannotCompileError as CannotCompileError
