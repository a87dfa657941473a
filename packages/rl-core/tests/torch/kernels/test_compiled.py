"""Functions that call kernels compile to one graph, with the operators of the kernels in it."""

import kernel_cases


def test_a_compiled_function_calls_the_operators_and_has_the_same_gradients(interpreter):
    ((operators, errors),) = interpreter.run(kernel_cases.compiled, [()])
    called = {name.split(".")[1] for name in operators}
    names = {"rms_norm", "swiglu", "rotated"}
    assert called == names | {f"{name}_backward" for name in names}
    assert max(errors.values()) < 1e-6, errors
