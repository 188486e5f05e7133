# SPDX-License-Identifier: Apache-2.0
#
# README's first code block is examples/quickstart.cpp, which is compiled and run: they must not
# drift apart. Run as: cmake -DSOURCE_DIR=<repository> -P readme_quickstart.cmake
file(READ "${SOURCE_DIR}/README.md" readme)
file(READ "${SOURCE_DIR}/examples/quickstart.cpp" quickstart)
string(FIND "${readme}" "```cpp\n" begin)
if(begin EQUAL -1)
  message(FATAL_ERROR "README.md has no C++ code block")
endif()
math(EXPR begin "${begin} + 7")
string(SUBSTRING "${readme}" ${begin} -1 block)
string(FIND "${block}" "```" end)
string(SUBSTRING "${block}" 0 ${end} block)
if(NOT block STREQUAL quickstart)
  message(FATAL_ERROR "README.md's first code block differs from examples/quickstart.cpp")
endif()
