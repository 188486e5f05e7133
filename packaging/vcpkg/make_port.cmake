# SPDX-License-Identifier: Apache-2.0
#
# Makes an overlay port of this tree, with the tree's sources in it. vcpkg identifies a package by the
# files in the port's folder: if the sources were elsewhere, they could change and vcpkg would not build
# them again.
#
#   cmake [-DTO=<folder>] -P packaging/vcpkg/make_port.cmake       makes <folder>/kvpolicy (default: ports)
cmake_minimum_required(VERSION 3.23)
if(NOT DEFINED TO)
  set(TO ports)
endif()
get_filename_component(TO "${TO}" ABSOLUTE BASE_DIR "${CMAKE_CURRENT_BINARY_DIR}")
get_filename_component(tree "${CMAKE_CURRENT_LIST_DIR}/../.." ABSOLUTE)

file(REMOVE_RECURSE "${TO}/kvpolicy")
file(COPY "${CMAKE_CURRENT_LIST_DIR}/port/" DESTINATION "${TO}/kvpolicy")
file(COPY "${tree}/CMakeLists.txt" "${tree}/LICENSE" "${tree}/cmake" "${tree}/include" "${tree}/kernels"
     DESTINATION "${TO}/kvpolicy/source")
message(STATUS "made the port ${TO}/kvpolicy")
