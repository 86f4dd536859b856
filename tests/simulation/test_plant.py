"""What a plant says that a step takes, added up by hand."""

import pytest
from msgspec import structs

from flyball_simulation.plant import Device, Disturbances, Plant

PLANT = Plant(
    shape="linear",
    overhead_s=0.001,
    weights_s=0.004,
    token_s=0.0002,
    decode_s=0.0001,
    context_token_s=1e-6,
    attention_pair_s=1e-7,
)
STEP = (100, 8, 4000, 5000)
"""P, D, K and Q."""
COUNTS = {
    "overhead_s": 1,
    "weights_s": 1,
    "token_s": 108,
    "decode_s": 8,
    "context_token_s": 4000,
    "attention_pair_s": 5000,
}


def test_every_time_counts_as_often_as_the_step_has_it() -> None:
    assert set(COUNTS) == {name for name in Plant.__struct_fields__ if name.endswith("_s")}
    for name, number in COUNTS.items():
        more = structs.replace(PLANT, **{name: getattr(PLANT, name) + 1.0})
        assert more.seconds(*STEP) == pytest.approx(PLANT.seconds(*STEP) + number), name


def test_a_knee_takes_the_longer_of_weights_and_tokens() -> None:
    knee = structs.replace(PLANT, shape="knee")
    assert knee.seconds(*STEP) == pytest.approx(0.001 + 108 * 0.0002 + 8 * 0.0001 + 0.004 + 0.0005)
    assert knee.seconds(0, 8, 4000, 0) == pytest.approx(0.001 + 0.004 + 8 * 0.0001 + 0.004)


def test_an_interaction_makes_prompts_dearer_beside_decodes() -> None:
    both = structs.replace(PLANT, shape="interaction")
    extra_s = 0.0002 / 256 * 100 * 8
    assert both.seconds(*STEP) == pytest.approx(structs.replace(PLANT, shape="knee").seconds(*STEP) + extra_s)


def test_steps_after_a_prompt_take_longer_the_first_one_most() -> None:
    plant = structs.replace(PLANT, after_prompt=0.12)
    device = Device(plant, Disturbances(noise=0.0), 0, 0)
    prompt, decodes = (100, 0, 0, 5000), (0, 8, 4000, 0)
    told = [
        device.seconds(0.0, *work) / plant.seconds(*work) for work in (decodes, prompt, *[decodes] * 3, prompt, decodes)
    ]
    assert told == pytest.approx([1.0, 1.0, 1.12, 1.06, 1.04, 1.0, 1.12])
