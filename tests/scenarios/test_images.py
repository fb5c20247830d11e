"""Few large images over many devices: rows are split, with halos, where examples do not suffice.

A batch of one or two leaves most of eight devices without an example. Rows of images are plenty (Dryden et al. 2019;
LAMP, Zhu et al. 2020), and a halo is a small part of an image.
"""

import pytest

import autoshard
from tests.images import Plain, Volumes, shapes, training


def plan_for(model, shape, cluster="8xH100-80GB", **options):
    args = shapes(model, shape)
    return autoshard.search(training(model), *args, cluster=cluster, stages=1, verify="never", **options)


def title(plan):
    return str(plan).splitlines()[0]


def test_rows_of_one_image():
    plan = plan_for(Plain(), (1, 512, 512, 3))
    assert title(plan) == "spatial parallel over 8"
    assert "collective-permute" in {one.kind for one in plan.estimates.collectives}


def test_rows_of_two_images_beside_examples():
    assert title(plan_for(Plain(), (2, 512, 512, 3))) == "data parallel over 2 x spatial parallel over 4"


def test_slices_of_a_volume():
    assert title(plan_for(Volumes(32), (1, 128, 128, 128, 2))) == "spatial parallel over 8"


def test_examples_where_there_are_enough():
    assert "spatial" not in title(plan_for(Plain(), (8, 512, 512, 3)))


@pytest.mark.slow
def test_an_image_whose_activations_no_device_could_hold():
    model, shape = Plain(), (1, 8192, 8192, 3)
    with pytest.raises(autoshard.InfeasibleError):
        plan_for(model, shape, cluster="1xH100-80GB", remat="never")
    plan = plan_for(model, shape, remat="never")
    assert title(plan) == "spatial parallel over 8"
    assert plan.estimates.peak_bytes < 77 * 2**30
