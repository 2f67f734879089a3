"""Engines: they run the local steps of a chunk of clients. ``README.md`` compares them."""

from pl_fed.engine.base import CannotCompileError as CannotCompileError
from pl_fed.engine.base import CannotStackError as CannotStackError
from pl_fed.engine.base import Chunk as Chunk
from pl_fed.engine.base import Clipping as Clipping
from pl_fed.engine.base import Engine as Engine
from pl_fed.engine.base import LocalSettings as LocalSettings
from pl_fed.engine.batched import StackedRunner as StackedRunner
from pl_fed.engine.batched import TurnRunner as TurnRunner
from pl_fed.engine.choice import EngineChoice as EngineChoice
from pl_fed.engine.choice import Workload as Workload
from pl_fed.engine.one_by_one import OneByOne as OneByOne
from pl_fed.engine.options import EngineName as EngineName
from pl_fed.engine.options import EngineOptions as EngineOptions
