# SPDX-License-Identifier: Apache-2.0
#
# cmake "-DFOLDERS=core storage" -DLIST=<file> -P write_batches.cmake: batches of the tests in these folders of
# tests/, in ./batches, for a build without CMake (scripts/test-aarch64); their names go into LIST, one a line.
cmake_minimum_required(VERSION 3.25)
set(KVPOLICY_BATCHES ON)
include("${CMAKE_CURRENT_LIST_DIR}/KvpolicyBatches.cmake")
separate_arguments(FOLDERS)
set(text)
foreach(folder IN LISTS FOLDERS)
  file(GLOB sources "${CMAKE_CURRENT_LIST_DIR}/../tests/${folder}/*_test.cpp")
  list(TRANSFORM sources REPLACE "/cmake/[.][.]/" "/")
  kvpolicy_batches(files ${folder} ${sources})
  list(JOIN files "\n" lines)
  string(APPEND text "${lines}\n")
endforeach()
file(WRITE "${LIST}" "${text}")
