# SPDX-License-Identifier: Apache-2.0
#
# cmake -DBUILD_DIR=... -DPREFIX=... -P install.cmake: installs into an empty prefix, so that no removed
# header is left. Time stamps are kept, so that unchanged files are not rebuilt.
file(REMOVE_RECURSE "${PREFIX}")
execute_process(COMMAND ${CMAKE_COMMAND} --install "${BUILD_DIR}" --prefix "${PREFIX}"
                COMMAND_ERROR_IS_FATAL ANY)
foreach(file include/kvpolicy/version.hpp share/cmake/kvpolicy/kvpolicyConfig.cmake
             share/pkgconfig/kvpolicy.pc)
  if(NOT EXISTS "${PREFIX}/${file}")
    message(FATAL_ERROR "not installed: ${file}")
  endif()
endforeach()
