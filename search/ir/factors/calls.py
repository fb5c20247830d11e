"""Primitives that the registry leaves to others: those with programs inside, and those that plain steps do
not hold."""

CALLS = frozenset(
    {
        "jit",
        "custom_jvp_call",
        "custom_jvp_call_jaxpr",
        "custom_vjp_call",
        "custom_vmap_call",
        "custom_lin",
        "linear_call",
        "remat2",
        "remat_opt",
        "composite",
        "eval_jaxpr",
    }
)
"""Calls: tracing inlines them."""

CONTROL_FLOW = frozenset({"scan", "while", "cond"})
"""Ops with inner graphs: their factors follow from recursing."""
