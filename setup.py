"""Compiles the native kernels. Optional: without a C++ compiler the install succeeds and the torch backend is used."""

from glob import glob

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "abc_attn.kernels._native",
            ["abc_attn/kernels/native.cpp"],
            depends=glob("abc_attn/kernels/native_*.h"),
            language="c++",
            extra_compile_args=["-O3", "-std=c++17", "-fno-math-errno", "-Wno-psabi", "-Wno-maybe-uninitialized"],
            optional=True,
        )
    ]
)
