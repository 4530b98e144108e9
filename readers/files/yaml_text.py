"""Parse YAML into plain values: no tags, no aliases, and no key twice."""

from __future__ import annotations

import re
from typing import Any

from penstock.cache import MissingDependencyError

_EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")


def parse_yaml(text: str, *, what: str, instead: str = "") -> Any:
    """Parse YAML into plain values. what, instead: begin and end the message if PyYAML is missing,
    such as "A mixture file". Raises ValueError, and MissingDependencyError."""
    try:
        import yaml
    except ImportError as error:
        raise MissingDependencyError(
            f"{what} in YAML needs the package PyYAML, which isn't installed. Install the extra: "
            f"pip install 'penstock[yaml]'.{instead}"
        ) from error

    loader, seen = yaml.SafeLoader(""), set[int]()

    def plain(node: Any) -> Any:
        """Return the value of a node."""
        kind = node.tag.removeprefix("tag:yaml.org,2002:")
        if id(node) in seen:
            raise ValueError(f"{_line(node)}: an alias (*name) isn't supported; write its value")
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode) and kind == "seq":
            return [plain(each) for each in node.value]
        if isinstance(node, yaml.MappingNode) and kind == "map":
            found = dict[str | int, Any]()
            for key_node, value_node in node.value:
                key = plain(key_node)
                if type(key) not in (str, int):
                    raise ValueError(f"{_line(key_node)}: the key {key!r} is no text; quote it")
                if key in found:
                    raise ValueError(f'{_line(key_node)}: the key "{key}" occurs twice')
                found[key] = plain(value_node)
            return found
        if kind in ("str", "timestamp", "merge"):  # as in JSON and YAML 1.2, 1e-9 is a number
            is_number = node.style is None and _EXPONENT.fullmatch(node.value)
            return float(node.value) if is_number else node.value
        if isinstance(node, yaml.ScalarNode) and kind in ("int", "float", "bool", "null"):
            return loader.construct_object(node)
        raise ValueError(f"{_line(node)}: the tag {node.tag!r} isn't supported: only plain values")

    try:
        root = yaml.compose(text, yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
    return None if root is None else plain(root)


def _line(node: Any) -> str:
    return f"line {node.start_mark.line + 1}"
