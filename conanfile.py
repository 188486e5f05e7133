# SPDX-License-Identifier: Apache-2.0
#
# The Conan 2 recipe. Header-only: one package serves every compiler, system and option; the options
# say which components a consumer gets and which packages these need.
#
#   conan create . --build=missing                                     kvpolicy::kvpolicy
#   conan create . --build=missing -o "&:with_cpu=True" -o "&:with_io=True"   and ::cpu, ::io
#
# with_format adds kvpolicy::format and fmt. with_cuda adds kvpolicy::cuda; the CUDA Toolkit is found on the machine, for Conan has no package
# of it.
import os
import re

from conan import ConanFile
from conan.tools.build import check_min_cppstd
from conan.tools.files import copy, load, save

required_conan_version = ">=2.0"

# Included by what CMakeDeps generates, once its targets exist.
FIND_CUDA = """\
find_package(CUDAToolkit 12.0 REQUIRED)
set_property(TARGET kvpolicy::cuda APPEND PROPERTY INTERFACE_LINK_LIBRARIES CUDA::cudart)
"""
FIND_CUDA_PATH = os.path.join("share", "cmake", "kvpolicy", "kvpolicy-conan-cuda.cmake")


class KvpolicyConan(ConanFile):
    name = "kvpolicy"
    description = "Per-head KV-cache policies for LLM inference"
    license = "Apache-2.0"
    topics = ("llm", "inference", "kv-cache", "attention", "header-only")
    package_type = "header-library"
    settings = "os", "arch", "compiler", "build_type"
    options = {"with_cpu": [True, False], "with_io": [True, False], "with_format": [True, False],
               "with_cuda": [True, False]}
    default_options = {"with_cpu": False, "with_io": False, "with_format": False, "with_cuda": False}
    exports = "include/kvpolicy/version.hpp"
    exports_sources = "include/*", "kernels/*", "LICENSE"
    no_copy_source = True
    test_package_folder = "packaging/conan/test_package"

    def set_version(self):
        text = load(self, os.path.join(self.recipe_folder, "include", "kvpolicy", "version.hpp"))
        parts = dict(re.findall(r"^#define KVPOLICY_VERSION_(MAJOR|MINOR|PATCH) (\d+)$", text, re.M))
        self.version = ".".join(parts[part] for part in ("MAJOR", "MINOR", "PATCH"))

    def requirements(self):
        # Their headers are included by ours.
        if self.options.with_cpu:
            self.requires("highway/[>=1.0.3 <2]", transitive_headers=True, transitive_libs=True)
        if self.options.with_io:
            self.requires("nlohmann_json/[>=3.10 <4]", transitive_headers=True)
        if self.options.with_format:
            self.requires("fmt/[>=9]", transitive_headers=True, transitive_libs=True)

    def validate(self):
        if self.settings.get_safe("compiler.cppstd"):
            check_min_cppstd(self, 20)

    def package(self):
        copy(self, "LICENSE", self.source_folder, os.path.join(self.package_folder, "licenses"))
        for root, pattern in (("include", "*.hpp"), ("kernels", "*.cuh")):
            copy(self, pattern, os.path.join(self.source_folder, root),
                 os.path.join(self.package_folder, "include"),
                 excludes="kvpolicy/compiled/*")  # this package has headers alone
        save(self, os.path.join(self.package_folder, FIND_CUDA_PATH), FIND_CUDA)

    def package_id(self):
        self.info.clear()

    def package_info(self):
        self.cpp_info.bindirs = []
        self.cpp_info.libdirs = []
        # The same names as those of the CMake package. The target of all components together needs
        # another one than the first component's.
        self.cpp_info.set_property("cmake_file_name", "kvpolicy")
        self.cpp_info.set_property("cmake_target_name", "kvpolicy::all")
        self.cpp_info.set_property("pkg_config_name", "kvpolicy-all")
        self._component("kvpolicy", "kvpolicy", [])
        if self.options.with_cpu:
            self._component("cpu", "kvpolicy-cpu", ["kvpolicy", "highway::hwy"])
        if self.options.with_io:
            self._component("io", "kvpolicy-io", ["kvpolicy", "nlohmann_json::nlohmann_json"])
        if self.options.with_format:
            self._component("format", "kvpolicy-format", ["kvpolicy", "fmt::fmt"])
        if self.options.with_cuda:
            self._component("cuda", "kvpolicy-cuda", ["kvpolicy"])
            self.cpp_info.set_property("cmake_build_modules", [FIND_CUDA_PATH])

    def _component(self, name, pkg_config_name, requires):
        component = self.cpp_info.components[name]
        component.set_property("cmake_target_name", f"kvpolicy::{name}")
        component.set_property("pkg_config_name", pkg_config_name)
        component.requires = requires
        component.bindirs = []
        component.libdirs = []
