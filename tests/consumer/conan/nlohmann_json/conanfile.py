# SPDX-License-Identifier: Apache-2.0
#
# Replaces Conan Center's package of this name, so that our recipe can be tested without a remote. It stands
# for the system's own headers, which are found without a path.
from conan import ConanFile


class SystemNlohmannJson(ConanFile):
    name = "nlohmann_json"
    version = "3.10.5"

    def package_info(self):
        self.cpp_info.includedirs = []
        self.cpp_info.libdirs = []
        self.cpp_info.bindirs = []
