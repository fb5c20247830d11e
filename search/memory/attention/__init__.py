"""Attention that a step spells out, as blockwise ops: recognised by its meaning, forward and backward.

A region begins at a product of queries and keys whose result, scaled, masked or biased, goes through a softmax. It is
recognised by two interpretations over the graph's ops.

*The softmax's argument.* From the exponential backwards to the product, all ops are elementwise, or they move dimensions.
They become a function of the raw score, of positions, and of operands that depend on rows or on columns alone
(`search.ir.attention.scores.Scores`). A mask from `iota` is thus computed anew in each block.

*The rest.* Every later value is a polynomial in the exponentials E, their row sums L, the product DP of the output's
gradient with the values, and its weighted row sum R:

    probabilities                 E / L
    gradient of the raw scores    a (E DP / L - E R / L^2)         for a scale a

Whatever order the author, or JAX's derivative of a softmax, computes these in, the polynomial is the same. Products whose
operands are such values are the output and the gradients of queries, keys and values. If they are all there is, they are
replaced by two blockwise ops. A region with another use of its scores (weights that are returned, dropout) stays as it is.

Dimensions are followed by labels: a fresh label for each, and two that meet become one.
"""
