"""The chart of the fixed parts of a namespace renders and lints. `tox -e manifests` installs the tools."""

from pathlib import Path

import pytest
import yaml

CHART = Path(__file__).parents[5] / "charts" / "rl"

VALUES = [
    pytest.param({}, id="defaults"),
    pytest.param(
        {
            "claims": {"shared": {"size": "1Ti", "storageClass": "nfs"}, "models": {"size": "500Gi"}},
            "submitters": [{"kind": "Group", "name": "research"}, {"kind": "ServiceAccount", "name": "ci"}],
        },
        id="claims-and-submitters",
    ),
    pytest.param({"networkPolicy": {"prometheusNamespace": "monitoring"}}, id="prometheus"),
    pytest.param({"serviceAccount": {"create": False}, "networkPolicy": {"enabled": False}}, id="nothing-fixed"),
]


@pytest.mark.parametrize("values", VALUES)
def test_the_chart_renders_objects_that_kubernetes_accepts(values):
    chart = pytest.importorskip("helm_python.chart").Chart.load(str(CHART))
    validator = pytest.importorskip("kubernetes_validate")
    rendered = chart.render(values=values, name="rl", namespace="research")
    objects = [each for text in rendered.values() for each in yaml.safe_load_all(text) if each]
    assert {each["metadata"]["name"] for each in objects if each["kind"] == "PersistentVolumeClaim"} == set(
        {"shared": {}, **values.get("claims", {})}
    )
    for each in objects:
        validator.validate(each, validator.latest_version(), strict=True)


@pytest.mark.parametrize(
    ("values", "admitted"),
    [
        ({}, {("kuberay-operator", 8265)}),
        (
            {"prometheusNamespace": "monitoring", "prometheusPort": 9500},
            {("kuberay-operator", 8265), ("monitoring", 9500)},
        ),
    ],
)
def test_other_namespaces_reach_only_the_ports_that_are_meant_for_them(values, admitted):
    chart = pytest.importorskip("helm_python.chart").Chart.load(str(CHART))
    rendered = chart.render(values={"networkPolicy": values}, name="rl")
    policy = next(
        each
        for text in rendered.values()
        for each in yaml.safe_load_all(text)
        if each and each["kind"] == "NetworkPolicy"
    )
    _, *others = policy["spec"]["ingress"]
    assert {
        (source["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"], port["port"])
        for rule in others
        for source in rule["from"]
        for port in rule["ports"]
    } == admitted


def test_the_chart_has_a_queue_of_kueue_if_asked():
    chart = pytest.importorskip("helm_python.chart").Chart.load(str(CHART))
    queue = chart.render(values={"kueue": {"enabled": True, "clusterQueue": "gpus"}}, name="rl")[
        "rl/templates/queue.yaml"
    ]
    assert yaml.safe_load(queue)["spec"] == {"clusterQueue": "gpus"}
    with pytest.raises(Exception, match=r"kueue\.clusterQueue must be set"):
        chart.render(values={"kueue": {"enabled": True}}, name="rl")


def test_the_chart_lints_and_refuses_unknown_values():
    helm = pytest.importorskip("helm_python.chart")
    assert not [message for message in helm.lint(str(CHART), strict=True)["messages"] if message["severity"] > 1]
    with pytest.raises(Exception, match="additional properties 'queue' not allowed"):
        helm.Chart.load(str(CHART)).render(values={"queue": {"enabled": True}}, name="rl")
