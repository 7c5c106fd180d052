"""Specs and annotations: equal meaning is equal value, wrong ones say rule, value, what exists and the fix."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from elaswave_spmd.errors import SpecError
from elaswave_spmd.mesh import MeshShape
from elaswave_spmd.sharding import P, Shardings, Tie, check_spec, shard, specs_of, tie


def linear() -> SimpleNamespace:
    return SimpleNamespace(weight=SimpleNamespace(shape=(8, 4)), bias=None)


def test_specs_are_values() -> None:
    assert P("dp", None) == P(("dp",), ()) and hash(P("dp", None)) == hash(P(("dp",), ()))
    assert P("dp") != P("dp", None)
    assert eval(repr(P(("pp", "dp"), None, "tp"))) == P(("pp", "dp"), None, "tp")
    assert repr(P()) == "P()" and repr(P(("pp", "dp"))) == 'P(("pp", "dp"))'
    with pytest.raises(AttributeError):
        P("dp").entries = ()  # type: ignore[misc]


def test_dims_and_axes() -> None:
    spec = P(None, ("dp", "tp"))
    assert spec.axes == ("dp", "tp")
    assert [spec.axes_of(dim) for dim in range(3)] == [(), ("dp", "tp"), ()]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (("ep",), r"'ep' in P\(\"ep\"\)(?s:.*)axes pp, dp, tp, fsdp"),
        (("dpp",), "write 'pp'|write 'dp'"),
        (("",), "axes pp, dp, tp, fsdp"),
        (("dp", "dp"), "at most once"),
        ((("dp", "dp"),), "at most once"),
        ((("dp", "pp"),), r"write \('pp', 'dp'\)"),
        ((("tp", "dp"),), r"write \('dp', 'tp'\)"),
        ((3,), "None, an axis, or a tuple"),
        (((("dp",),),), "None, an axis, or a tuple"),
    ],
)
def test_wrong_specs(entries: tuple, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        P(*entries)


def test_spec_fits_its_array() -> None:
    mesh = MeshShape.parse("dp3_tp2_fsdp2")
    check_spec(P("dp"), (7,), mesh)
    check_spec(P(("fsdp", "tp")), (8,), mesh)
    check_spec(P("tp"), (7,), MeshShape.parse("dp2"))
    check_spec(P(), (), mesh)
    with pytest.raises(SpecError, match=r"(?s)P\(\"tp\", None\).*shape \(7,\).*embed.weight.*write P\(\"tp\"\)"):
        check_spec(P("tp", None), (7,), mesh, "embed.weight")
    with pytest.raises(
        SpecError, match=r"(?s)6 is no multiple of 4.*dim 0.*embed.weight.*fsdp of size 2, tp of size 2"
    ):
        check_spec(P(("fsdp", "tp")), (6,), mesh, "embed.weight")


def test_zero_levels() -> None:
    assert Shardings() == Shardings(batch=P("dp"), layers=P("pp"), params=P(None), grads=P(None), optim=P(None))
    for level in range(4):
        assert Shardings(layers=P(None)).with_zero(level).name == f"zero{level}"
        assert Shardings().with_zero(level).name == f"zero{level}"
        assert Shardings().with_zero(3).with_zero(level) == Shardings().with_zero(level)
    assert Shardings().with_zero(1) == Shardings(optim=P("dp"))
    assert Shardings(layers=P(None)).with_zero(1).layers == P(None)
    with pytest.raises(SpecError, match="0, 1, 2, 3"):
        Shardings().with_zero(4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"params": P("dp")}, r"(?s)params=P\(\"dp\"\), grads=P\(None\).*add grads=P\(\"dp\"\), optim=P\(\"dp\"\)"),
        ({"grads": P("dp")}, r"add optim=P\(\"dp\"\)"),
        ({"params": P("dp"), "optim": P("dp")}, r"add grads=P\(\"dp\"\)$"),
        ({"optim": P("pp")}, r"(?s)Shardings.optim is one entry, on 'dp'"),
        ({"optim": P("tp")}, "shard()"),
        ({"batch": P("pp")}, "on 'dp'"),
        ({"batch": P("dp", None)}, "one entry"),
        ({"layers": P("dp")}, "on 'pp'"),
        ({"layers": "pp"}, r"write P\(\"pp\"\)"),
    ],
)
def test_contradicting_shardings(fields: dict, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Shardings(**fields)


def test_shard_returns_its_module_and_remembers() -> None:
    module = linear()
    assert specs_of(module) == {}
    assert shard(module, weight=P("tp", None)) is module
    assert specs_of(module) == {"weight": P("tp", None)}
    shard(module, weight=P(None, "tp"))
    assert specs_of(module) == {"weight": P(None, "tp")}
    specs_of(module).clear()
    assert specs_of(module) == {"weight": P(None, "tp")}
    assert specs_of(linear()) == {}


def test_specs_of_a_tree_have_paths() -> None:
    child = shard(linear(), weight=P("tp"))
    parent = SimpleNamespace(named_modules=lambda: [("", SimpleNamespace()), ("attn.qkv", child)])
    assert specs_of(parent) == {"attn.qkv.weight": P("tp")}


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ({"wieght": P("tp")}, r"(?s)wieght.*exists: weight"),
        ({"bias": P("tp")}, r"(?s)bias.*exists: weight"),
        ({"weight": P("tp", None, None)}, "at most one entry per dim"),
        ({"weight": P("dp")}, r"(?s)'dp' lies across workers.*axes tp, fsdp.*Shardings"),
        ({"weight": P("pp")}, "'pp' lies across workers"),
        ({"weight": "tp"}, "write P"),
    ],
)
def test_wrong_shard(specs: dict, message: str) -> None:
    module = linear()
    with pytest.raises(SpecError, match=message):
        shard(module, **specs)
    assert specs_of(module) == {}


def test_ties() -> None:
    assert tie("head.weight", "embed.weight") == Tie(reader="head.weight", owner="embed.weight")
    assert str(tie("head.weight", "embed.weight")) == "head.weight = embed.weight"
    for names in (("head", "embed.weight"), ("head.weight", ""), (".head", "embed.weight"), ("a.b", "a.b")):
        with pytest.raises(SpecError, match=r"tie\(\)"):
            tie(*names)
