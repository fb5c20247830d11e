"""Arguments of a step by keyword: in a call, in `init`, and beside the options of `search`, `emit` and `verify`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard import InputError, keywords
from autoshard.calls import Callee

pytestmark = pytest.mark.devices

W, X = jnp.ones((16, 8)) / 16, jnp.linspace(-1, 1, 24 * 16).reshape(24, 16)
SHAPES = jax.eval_shape(lambda: (W, X))


def by_position(state, batch, scale=1.0):
    return state - scale * jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(state)


def half(state, *, batch, scale=1.0):
    return by_position(state, batch, scale)


def keyword_only(*, state, batch, scale=1.0):
    return by_position(state, batch, scale)


def batch_first(*, batch, state):
    return by_position(state, batch)


def wrapped(*args, **kwargs):
    return by_position(*args, **kwargs)


STEPS = [
    by_position,
    half,
    keyword_only,
    batch_first,
    functools.wraps(by_position)(wrapped),
    jax.jit(keyword_only),
]


# --- search, emit, choices


@pytest.mark.parametrize("step", STEPS)
def test_a_step_is_searched_and_emitted_with_its_arguments_by_keyword(step):
    w, x = SHAPES
    plan = autoshard.search(step, state=w, batch=x, cluster="8xCPU", mesh=(8,))
    assert set(plan.decisions.arguments) == {"state", "batch"}
    program = autoshard.emit(step, state=w, batch=x, plan=plan)
    args = jax.tree.map(
        jax.device_put, (W, X) if program.args[0].shape == W.shape else (X, W), program.shardings
    )
    np.testing.assert_allclose(program.fn(*args), by_position(W, X), rtol=1e-5)
    name = next(iter(plan.decisions.ops))
    assert plan.decisions.ops[name] in autoshard.choices(step, state=w, batch=x, plan=plan, name=name)


def test_a_keyword_that_has_a_position_gives_the_plan_of_the_position():
    w, x = SHAPES
    plan = autoshard.search(by_position, w, x, cluster="8xCPU", mesh=(8,))
    assert autoshard.search(by_position, batch=x, state=w, cluster="8xCPU", mesh=(8,)) == plan
    assert autoshard.search(by_position, w, batch=x, cluster="8xCPU", mesh=(8,)) == plan


def split_keywords(step, *args, options=None, **kwargs):
    return keywords.split_keywords("search", Callee.of(step), len(args), kwargs, options or {})


def without_state(w, batch):
    return w


def counting(state, mesh, step, plan=None):
    return state, mesh, step


@pytest.mark.parametrize(
    ("step", "options", "ours"),
    [
        (without_state, {"state": "w"}, ()),
        (without_state, {"state": ("w",)}, ()),
        (by_position, {"state": W}, ("state",)),
        (by_position, {"state": {"w": W}}, ("state",)),
        (by_position, {"state": None}, ()),
        (keyword_only, {"state": [W, W]}, ("state",)),
        (counting, {"mesh": W, "state": {}}, ("mesh", "state")),
        (counting, {"plan": W, "microbatches": 2}, ("plan",)),
    ],
)
def test_a_keyword_with_two_meanings_goes_by_its_value(step, options, ours):
    kwargs, own = split_keywords(step, options=options)
    assert kwargs.keys() == set(ours)
    assert own == {name: None if name in ours else value for name, value in options.items()}


def test_an_argument_that_is_given_by_position_is_not_looked_for_among_options():
    with pytest.raises(InputError, match="wanted state as the pytree path of an argument, or several, got 3"):
        split_keywords(by_position, W, options={"state": 3})
    assert split_keywords(by_position, W, options={"state": "state"}) == ({}, {"state": "state"})


def test_an_option_that_takes_the_value_of_an_argument_says_so():
    said = "mesh= is an option of search, and counting lacks its argument of that name. Give the argument by position"
    with pytest.raises(InputError, match=said):
        split_keywords(counting, W, options={"mesh": (2, 4)})
    assert split_keywords(counting, W, X, options={"mesh": (2, 4)}) == ({}, {"mesh": (2, 4)})


@pytest.mark.parametrize("step", [by_position, keyword_only, lambda x: x, jnp.sum])
def test_a_keyword_that_nobody_knows_is_refused(step):
    said = r"search has no option 'memroy' \(did you mean 'memory'\?\), and .* no argument of that name"
    with pytest.raises(InputError, match=said):
        split_keywords(step, memroy="1GiB", options={"memory": None, "mesh": None})


def test_an_argument_that_is_given_twice_is_the_step_s_error():
    with pytest.raises(InputError, match=r"by_position\(\) got multiple values for argument 'batch'"):
        autoshard.search(by_position, *SHAPES, batch=SHAPES[1], cluster="8xCPU")


def test_arguments_of_the_name_of_the_first_parameter_are_free():
    def step(state, step):
        return state + step

    shape = jax.ShapeDtypeStruct((8,), "float32")
    plan = autoshard.search(step, shape, step=shape, cluster="8xCPU")
    assert set(plan.decisions.arguments) == {"state", "step"}


class Trainer:
    @autoshard.parallelize
    def step(self, state, *, batch):
        return by_position(state, batch)


def test_a_method_is_searched_with_its_object():
    plan = autoshard.search(Trainer().step, SHAPES[0], batch=SHAPES[1], cluster="8xCPU", mesh=(8,))
    assert set(plan.decisions.arguments) == {"state", "batch"}


# --- init


@pytest.mark.parametrize(
    ("step", "others"),
    [
        (by_position, {"args": (X,)}),
        (by_position, {"kwargs": {"batch": X}}),
        (half, {"kwargs": {"batch": X}}),
        (keyword_only, {"kwargs": {"batch": X}}),
        (keyword_only, {"args": (X,)}),
        (batch_first, {"kwargs": {"batch": X}}),
        (Trainer().step, {"kwargs": {"batch": X}}),
    ],
)
def test_state_is_created_for_a_step_with_keywords(step, others):
    step = step if isinstance(step, autoshard.Parallelized) else autoshard.parallelize(step, mesh=(8,))
    state = step.init(lambda: W, **others)
    assert step.abstract_state(lambda: W, **others).sharding == state.sharding
    new = step(state=state, batch=X)
    np.testing.assert_allclose(new, by_position(W, X), rtol=1e-5)


def test_state_in_several_keyword_only_arguments():
    def step(*, w, velocity, batch):
        velocity = 0.9 * velocity + jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(w)
        return w - velocity, velocity

    parallel = autoshard.parallelize(step, mesh=(8,))
    w, velocity = parallel.init(lambda: (W, jnp.zeros_like(W)), kwargs={"batch": X})
    got = parallel(w=w, velocity=velocity, batch=X)
    np.testing.assert_allclose(got[0], by_position(W, X), rtol=1e-5)


@pytest.mark.parametrize(
    ("others", "said"),
    [
        (
            {"args": X},
            r"wanted args as the step's other arguments in a tuple, such as \(batch,\), got ArrayImpl",
        ),
        ({"args": {"batch": X}}, "wanted args as the step's other arguments in a tuple"),
        ({"kwargs": (X,)}, "wanted kwargs as arguments by name, such as {'batch': batch}, got tuple"),
        ({}, "half cannot be called with the state that create creates .*missing a required .*'batch'"),
        ({"kwargs": {"bacth": X}}, "half cannot be called with the state that create creates"),
        ({"args": (X, X, X)}, "half cannot be called with the state that create creates .*too many"),
    ],
)
def test_other_arguments_that_the_step_does_not_take(others, said):
    def create():
        return W

    with pytest.raises(InputError, match=said) as caught:
        autoshard.parallelize(half).init(create, **others)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("create", "said"),
    [
        (W, "wanted a function that creates the state, .* got ArrayImpl"),
        (
            lambda: None,
            "<lambda>, which shall create the state, returns no array; perhaps its `return` is missing",
        ),
    ],
)
def test_a_function_that_creates_nothing(create, said):
    with pytest.raises(InputError, match=said):
        autoshard.parallelize(half).init(create, kwargs={"batch": X})


# --- wrong calls


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda step: step(W), "by_position() missing 1 required positional argument: 'batch'"),
        (
            lambda step: step(W, X, 1.0, X),
            "by_position() takes from 2 to 3 positional arguments but 4 were given",
        ),
        (
            lambda step: step(W, bacth=X),
            "by_position() got an unexpected keyword argument 'bacth'. Did you mean 'batch'?",
        ),
        (lambda step: step(W, X, batch=X), "by_position() got multiple values for argument 'batch'"),
        (lambda step: step.lower(W), "by_position() missing 1 required positional argument: 'batch'"),
    ],
)
@pytest.mark.parametrize("options", [{}, {"static_argnames": "scale"}], ids=str)
def test_a_call_that_the_signature_refuses_fails_as_the_step_does(planned, call, said, options):
    for step in (autoshard.parallelize(by_position, **options), planned):
        with pytest.raises(TypeError) as caught:
            call(step)
        assert (type(caught.value), str(caught.value)) == (TypeError, said)


@pytest.fixture(scope="module")
def planned():
    step = autoshard.parallelize(by_position, mesh=(8,))
    step(W + 0, X)
    return step


@pytest.mark.parametrize("batch", ["train", object(), None, {}, X[:, :3]])
def test_a_wrong_argument_warns_of_no_plan_before_it_fails(planned, batch):
    with pytest.raises(InputError, match=r"argument \[1\] is|cannot be traced by jax\.jit"):
        planned(W + 0, batch)
