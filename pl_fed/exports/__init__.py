"""Export of clients' models as files that load without pl_fed."""

from pl_fed.exports.export import Export as Export
from pl_fed.exports.formats import FORMATS as FORMATS
from pl_fed.exports.request import Request as Request
