"""YAML of study files: labels are texts, also ``on``, ``no`` and ``0.1``."""

import re
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode

from pl_fed.command.config_files import check_yaml

_PREFIX = "tag:yaml.org,2002:"
_REPLACED = {f"{_PREFIX}{name}" for name in ("bool", "float", "timestamp")}
_TRUTH = re.compile(r"true|True|TRUE|false|False|FALSE")
_FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)


class StudyLoader(yaml.SafeLoader):
    """Study loader: reads keys as texts, and of other words only ``true`` and ``false`` as truth.

    YAML 1.1 reads ``on``, ``off``, ``yes`` and ``no`` as truth values, and ``1e-3`` as a text.
    """

    def compose_mapping_node(self, anchor: Any) -> MappingNode:
        """Return the node of a mapping, with texts as keys."""
        node: MappingNode = super().compose_mapping_node(anchor)
        for key, _ in node.value:
            if isinstance(key, ScalarNode) and key.tag != f"{_PREFIX}merge":
                key.tag = f"{_PREFIX}str"
        return node


StudyLoader.yaml_implicit_resolvers = {
    letter: [(tag, pattern) for tag, pattern in resolvers if tag not in _REPLACED]
    for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, _pattern, _letters in (("bool", _TRUTH, "tTfF"), ("float", _FLOAT, "-+.0123456789")):
    StudyLoader.add_implicit_resolver(
        f"{_PREFIX}{_tag}", re.compile(f"^(?:{_pattern.pattern})$"), list(_letters)
    )


def load_study(text: str) -> Any:
    r"""Return the value in the text of a study file.

    Raises:
        yaml.YAMLError: If the text is no YAML, repeats a key, or is unsafe to load.

    Example:
        >>> load_study("tune: {on: {attack: off}}\nlr: [1e-3, 10]")
        {'tune': {'on': {'attack': 'off'}}, 'lr': [0.001, 10]}
    """
    root: Node | None = check_yaml(text, StudyLoader)
    loader = StudyLoader("")
    return None if root is None else loader.construct_document(root)
