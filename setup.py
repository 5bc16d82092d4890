"""Compiles the native kernels. Optional: without a C++ compiler the install succeeds and the torch backend is used."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "abc_attn.kernels._native",
            ["abc_attn/kernels/native.cpp"],
            depends=[f"abc_attn/kernels/native_{part}.h" for part in ("vectors", "forward", "step", "backward", "ring", "band")],
            language="c++",
            extra_compile_args=["-O3", "-std=c++17", "-fno-math-errno", "-Wno-psabi", "-Wno-maybe-uninitialized"],
            optional=True,
        )
    ]
)
