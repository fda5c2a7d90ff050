"""What kustomize makes of a folder, for the part of it that ``deploy/kubernetes`` uses: resources,
components, generated config maps, images and patches by operations. Raises KeyError for anything else."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

Objects = list[dict[str, Any]]
_KINDS = {
    "kustomize.config.k8s.io/v1beta1": "Kustomization",
    "kustomize.config.k8s.io/v1alpha1": "Component",
}


def rendered(folder: Path) -> Objects:
    """All objects, config maps under their final names."""
    objects = _built(folder, [])
    for each in objects:
        generated = each.pop("generated", False)
        if generated:
            before = each["metadata"]["name"]
            each["metadata"]["name"] = f"{before}-{_hash(each)}"
            for other in objects:
                _rename(other, before, each["metadata"]["name"])
    return objects


def _built(folder: Path, objects: Objects) -> Objects:
    config = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert _KINDS[config.pop("apiVersion")] == config.pop("kind")
    steps = {
        "resources": _add,
        "configMapGenerator": _generate,
        "components": lambda folder, objects, path: _built(folder / path, objects),
        "patches": _patch,
        "images": _set_image,
    }
    unknown = config.keys() - steps
    if unknown:
        raise KeyError(f"{folder}: {sorted(unknown)}")
    for name, step in steps.items():
        for each in config.get(name, []):
            step(folder, objects, each)  # type: ignore[operator]
    return objects


def _add(folder: Path, objects: Objects, path: str) -> None:
    if (folder / path).is_dir():
        _built(folder / path, objects)
    else:
        objects += yaml.safe_load_all((folder / path).read_text())


def _generate(folder: Path, objects: Objects, wanted: dict[str, Any]) -> None:
    data = dict(each.split("=", 1) for each in wanted.get("literals", []))
    data |= {name: (folder / name).read_text() for name in wanted.get("files", [])}
    if wanted.get("behavior") == "merge":
        _one(objects, "ConfigMap", wanted["name"])["data"].update(data)
        return
    made = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": wanted["name"]}}
    objects.append(made | {"data": data, "generated": True})


def _patch(folder: Path, objects: Objects, wanted: dict[str, Any]) -> None:
    patched = _one(objects, **wanted["target"])
    for step in yaml.safe_load((folder / wanted["path"]).read_text()):
        *above, last = (part.replace("~1", "/") for part in step["path"].split("/")[1:])
        place: Any = patched
        for part in above:
            place = place[int(part) if isinstance(place, list) else part]
        if last == "-":
            assert step["op"] == "add"
            place.append(step["value"])
        else:
            assert step["op"] == "add" or last in place, step
            place[last] = step["value"]


def _set_image(folder: Path, objects: Objects, wanted: dict[str, str]) -> None:
    del folder
    for place in _mappings(objects):
        if place.get("image") == wanted["name"]:
            place["image"] = f"{wanted['newName']}:{wanted['newTag']}"


def _one(objects: Objects, kind: str, name: str) -> dict[str, Any]:
    (found,) = (
        each for each in objects if (each["kind"], each["metadata"]["name"]) == (kind, name)
    )
    return found


def _rename(place: Any, before: str, after: str) -> None:
    """In all references to a config map."""
    for each in _mappings(place):
        for name in ("configMapRef", "configMapKeyRef", "configMap"):
            if isinstance(own := each.get(name), dict) and own["name"] == before:
                own["name"] = after


def _mappings(place: Any) -> Iterator[dict[str, Any]]:
    if isinstance(place, dict):
        yield place
    for each in place.values() if isinstance(place, dict) else place:
        if isinstance(each, dict | list):
            yield from _mappings(each)


def _hash(config_map: dict[str, Any]) -> str:
    """Ten letters of its data's SHA-256, some of them changed so that they make no words. kustomize
    leaves the name empty there."""
    own = {"data": config_map["data"], "kind": "ConfigMap", "name": ""}
    # As Go writes JSON.
    text = json.dumps(own, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    for char in "<>&":
        text = text.replace(char, f"\\u{ord(char):04x}")
    digest = hashlib.sha256(text.encode()).hexdigest()
    return digest[:10].translate(str.maketrans("013ae", "ghkmt"))
