"""Manifests, checked without a cluster by the schemas of those that read them.

`tox -e manifests` installs the tools. KUBERAY_CRDS names a folder with `ray.io_rayjobs.yaml` and
`ray.io_rayclusters.yaml` of KubeRay (`ray-operator/config/crd/bases`), which may be gzipped.
"""

import gzip
import os
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest
import yaml
from job_requests import EVERYTHING, SITE, request_of

from rl_launch.submit.kubernetes.manifests import manifests

JOBS = [
    pytest.param(SITE, id="site"),
    pytest.param(EVERYTHING, id="everything"),
    *(
        pytest.param({**SITE, "queue": {"scheduler": name, "name": "q", "priority": "high"}}, id=name)
        for name in ("kai", "volcano")
    ),
    pytest.param({**EVERYTHING, "interactive": True}, id="interactive"),
]


@pytest.fixture(scope="module")
def crds():
    """Schemas of KubeRay's objects by kind. They refuse unknown fields, as an API server does if it is asked."""
    folder = os.environ.get("KUBERAY_CRDS")
    if not folder:
        pytest.skip("KUBERAY_CRDS names no folder with KubeRay's CRDs")
    return {kind: strict(schema_in(Path(folder), f"{kind.lower()}s")) for kind in ("RayJob", "RayCluster")}


def schema_in(folder, plural):
    path = folder / f"ray.io_{plural}.yaml"
    packed = Path(f"{path}.gz")
    text = path.read_text() if path.is_file() else gzip.decompress(packed.read_bytes()).decode()
    versions = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))["spec"]["versions"]
    return next(version for version in versions if version["name"] == "v1")["schema"]["openAPIV3Schema"]


def strict(schema):
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: strict(value) for key, value in schema.items()}
    is_object = schema.get("type") == "object" and isinstance(schema.get("properties"), dict)
    if is_object and "additionalProperties" not in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        closed["additionalProperties"] = False
    return closed


def of_kuberay(settings):
    return manifests(request_of(settings=settings))[-1]


def without_metadata(document):
    return {**document, "metadata": {}}


@pytest.mark.parametrize("settings", JOBS)
def test_kuberay_accepts_a_job(crds, settings):
    document = of_kuberay(settings)
    jsonschema.Draft202012Validator(crds[document["kind"]]).validate(without_metadata(document))


def test_a_misspelt_field_is_refused_at_any_depth(crds):
    document = of_kuberay(SITE)
    container = document["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]
    container["volumeMount"] = container.pop("volumeMounts")
    with pytest.raises(jsonschema.ValidationError, match="volumeMount"):
        jsonschema.Draft202012Validator(crds["RayJob"]).validate(without_metadata(document))


def rules(schema, value) -> Iterator[tuple[str, object]]:
    """Every rule of a schema that applies to a value, with the part of the value that it is about."""
    for rule in schema.get("x-kubernetes-validations", ()):
        yield rule["rule"], value
    if isinstance(value, dict):
        for name, part in value.items():
            if name in schema.get("properties", {}):
                yield from rules(schema["properties"][name], part)
    elif isinstance(value, list):
        for part in value:
            yield from rules(schema.get("items", {}), part)


def holds(rule, value):
    cel = pytest.importorskip("cel_expr_python.cel")
    variables = {"self": cel.Type.DYN, "oldSelf": cel.Type.DYN}
    return cel.NewEnv(variables=variables).compile(rule).eval(data={"self": value, "oldSelf": value}).value()


@pytest.mark.parametrize("settings", JOBS)
def test_the_rules_of_kuberays_schema_hold(crds, settings):
    document = of_kuberay(settings)
    assert all(holds(rule, value) for rule, value in rules(crds[document["kind"]], document))


def test_a_job_that_breaks_a_rule_is_found(crds):
    document = of_kuberay(SITE)
    document["spec"]["managedBy"] = "somebody"
    assert [value for rule, value in rules(crds["RayJob"], document) if not holds(rule, value)] == ["somebody"]


@pytest.mark.parametrize("settings", JOBS)
def test_kubernetes_accepts_the_pods_and_files(settings):
    validator = pytest.importorskip("kubernetes_validate")
    *files, document = manifests(request_of(settings=settings))
    cluster = document["spec"].get("rayClusterSpec", document["spec"])
    templates = [cluster["headGroupSpec"]["template"], *(group["template"] for group in cluster["workerGroupSpecs"])]
    pods = [{"apiVersion": "v1", "kind": "Pod", **template} for template in templates]
    for each in (*files, *pods):
        validator.validate(each, validator.latest_version(), strict=True)
