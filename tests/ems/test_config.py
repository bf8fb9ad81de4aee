"""EmsConfig, CcConfig_v1 and CcKvOption refuse what the tables exclude (spec ems 6.1 and 8.2), naming the argument."""

import ctypes

import pytest

from ems import CcConfig, CcConfig_v1, CcKvOption, EmsConfig, EmsErrorCode, EmsException, KvBufferWrapper, KVCacheType


def config(**changes):
    return CcConfig_v1(**{"rank_id": 8, "device_id": 0, "model_id": "llama2-13b", **changes})


def refused(call) -> str:
    with pytest.raises(EmsException) as caught:
        call()
    assert caught.value.status_code() == EmsErrorCode.EMS_INVALID_ARGUMENT
    return caught.value.message().split(":")[0]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rank_id", -1),
        ("rank_id", True),
        ("device_id", "0"),
        ("model_id", ""),
        ("model_id", "Llama"),
        ("model_id", "a" * 513),
        ("model_id", 5),
        ("tp_world_size", 0),
        ("pp_world_size", 1.5),
        ("rank_in_tp_group", 1),
        ("rank_in_pp_group", 1),
        ("model_id", "cc_kvstore@_@ds_default_ns_002"),
        ("llm_engine", ""),
        ("llm_engine", "\ud800"),
        ("kvcache_type", "GQB"),
    ],
)
def test_a_wrong_attribute_is_named(name, value):
    assert refused(EmsConfig(cc_config=config(**{name: value})).validate) == name


def test_defaults_are_those_of_the_table():
    assert config().llm_engine == "vllm"
    assert config().kvcache_type == KVCacheType.MHA == "MHA"
    assert (config().tp_world_size, config().rank_in_tp_group) == (1, 0)
    assert CcKvOption() == CcKvOption(write_rcache=True, read_local_only=False, timeout=5000)


def test_both_spellings_of_cc_config_are_one_attribute():
    one = config()
    assert EmsConfig(cc_config=one).cc_config_v1 is EmsConfig(cc_config_v1=one).cc_config is one
    assert EmsConfig(config=one).cc_config is EmsConfig(one).cc_config is one  # as table 6-1 prints it
    assert (EmsConfig(one).access_id, EmsConfig("a" * 8, "b" * 32, one).access_id) == (None, "a" * 8)
    for other in ({"cc_config_v1": config(rank_id=1)}, {"config": config(rank_id=1)}):
        assert refused(lambda other=other: EmsConfig(cc_config=one, **other)) == "cc_config"
    assert CcConfig is CcConfig_v1


@pytest.mark.parametrize("value", ["", None, "a.b-c_9", "cc_kvstore@_@ds_default_ns_001"])
def test_access_ids_of_the_charset_and_the_legacy_default_are_taken(value):
    EmsConfig(access_id=value, cc_config=config()).validate()


@pytest.mark.parametrize("value", ["A", "a@b", "a" * 513, 5])
def test_other_access_ids_are_refused(value):
    assert refused(EmsConfig(access_id=value, cc_config=config()).validate) == "access_id"


@pytest.mark.parametrize("value", ["short", "x" * 257, "-" * 32])
def test_other_access_keys_are_refused(value):
    assert refused(EmsConfig(access_key=value, cc_config=config()).validate) == "access_key"


@pytest.mark.parametrize(
    ("name", "value"),
    [("timeout", -1), ("timeout", 1.0), ("timeout", 2**32), ("write_rcache", 1), ("read_local_only", None)],
)
def test_options_out_of_range_are_named(name, value):
    option = CcKvOption()
    setattr(option, name, value)
    assert refused(option.validate) == f"option.{name}"


def test_the_type_may_be_set_after_construction():
    later = config()
    later.kvcache_type = KVCacheType.MLA
    later.validate()
    later.kvcache_type = "MLB"
    assert refused(later.validate) == "kvcache_type"


def test_a_buffer_wrapper_is_a_view_of_the_memory():
    data = (ctypes.c_ubyte * 4)(1, 2, 3, 4)
    view = KvBufferWrapper(ctypes.addressof(data), 4).view()
    assert bytes(view) == b"\1\2\3\4"
    view[0] = 9
    assert data[0] == 9
    assert refused(lambda: KvBufferWrapper(0, 4)) == "data_ptr"
    assert refused(lambda: KvBufferWrapper(1, 0)) == "length"


def test_what_deployed_adapters_ship_with_is_taken():
    EmsConfig(cc_config=config(model_id="cc_kvstore@_@ds_default_ns_001")).validate()


def test_a_rank_in_a_group_is_below_the_instances_ranks():
    config(tp_world_size=2, pp_world_size=4, rank_in_tp_group=7, rank_in_pp_group=3).validate()
    wrong = config(tp_world_size=2, pp_world_size=4, rank_in_tp_group=8)
    assert refused(wrong.validate) == "rank_in_tp_group"
