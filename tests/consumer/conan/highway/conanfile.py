# SPDX-License-Identifier: Apache-2.0
#
# Stands in for the Conan Center's package of this name, so that our recipe can be tested without
# a remote: the system's own headers, found without any path.
from conan import ConanFile


class SystemHighway(ConanFile):
    name = "highway"
    version = "1.0.3"

    def package_info(self):
        # As in the recipe of the Conan Center: one component per library.
        self.cpp_info.components["hwy"].system_libs = ["hwy"]
        for folders in (self.cpp_info, self.cpp_info.components["hwy"]):
            folders.includedirs = []
            folders.libdirs = []
            folders.bindirs = []
