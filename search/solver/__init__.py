"""The cheapest assignment of labels under memory constraints; knows nothing of JAX or of training."""
