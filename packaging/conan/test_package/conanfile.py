# SPDX-License-Identifier: Apache-2.0
#
# `conan create` runs this: it builds a program with the package and runs it, with each component that
# the options enabled.
import os

from conan import ConanFile
from conan.tools.build import can_run
from conan.tools.cmake import CMake, CMakeToolchain, cmake_layout


class KvpolicyTest(ConanFile):
    settings = "os", "arch", "compiler", "build_type"
    generators = "CMakeDeps"

    def requirements(self):
        self.requires(self.tested_reference_str)

    def layout(self):
        cmake_layout(self)

    def generate(self):
        options = self.dependencies["kvpolicy"].options
        toolchain = CMakeToolchain(self)
        toolchain.cache_variables["COMPONENTS"] = ";".join(
            name for name in ("cpu", "io", "format", "cuda") if options.get_safe(f"with_{name}"))
        toolchain.generate()

    def build(self):
        cmake = CMake(self)
        cmake.configure()
        cmake.build()

    def test(self):
        if not can_run(self):
            return
        for name in ("test_package", "test_cuda"):
            program = os.path.join(self.cpp.build.bindir, name)
            if name == "test_package" or os.path.exists(program):
                self.run(program, env="conanrun")
