# SPDX-License-Identifier: Apache-2.0
#
# Replaces Conan Center's package of this name, so that our recipe can be tested without a remote. It stands
# for the system's own headers, which are found without a path.
from conan import ConanFile


class SystemHighway(ConanFile):
    name = "highway"
    version = "1.0.3"

    def package_info(self):
        # As in Conan Center's recipe, each library is a component.
        self.cpp_info.components["hwy"].system_libs = ["hwy"]
        for folders in (self.cpp_info, self.cpp_info.components["hwy"]):
            folders.includedirs = []
            folders.libdirs = []
            folders.bindirs = []
