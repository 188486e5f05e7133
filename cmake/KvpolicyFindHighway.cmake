# SPDX-License-Identifier: Apache-2.0
#
# Finds Highway (https://github.com/google/highway) as hwy::hwy: by its CMake package, otherwise by
# pkg-config. Our own build uses this file, and so does the installed kvpolicyConfig.cmake. The engine
# dispatches statically; the library is linked only for Highway's own checks in debug builds.
if(NOT TARGET hwy::hwy)
  find_package(hwy CONFIG QUIET)
endif()
if(NOT TARGET hwy::hwy)
  find_package(PkgConfig QUIET)
  if(PkgConfig_FOUND)
    pkg_check_modules(kvpolicy_highway QUIET IMPORTED_TARGET libhwy)
    if(TARGET PkgConfig::kvpolicy_highway)
      add_library(hwy::hwy INTERFACE IMPORTED)
      set_target_properties(hwy::hwy PROPERTIES INTERFACE_LINK_LIBRARIES
                                                PkgConfig::kvpolicy_highway)
    endif()
  endif()
endif()
