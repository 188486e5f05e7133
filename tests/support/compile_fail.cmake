# SPDX-License-Identifier: Apache-2.0
#
# Tests code that must not compile: passes if the compiler refuses SOURCE with a message that contains the text
# of the source's line `// expect: <text>`, or with a first error that contains the text of its line
# `// expect in the first error: <text>`. Run as:
#   cmake -DCXX=<compiler> -DINCLUDES=<folder|folder> -DSOURCE=<file> -P compile_fail.cmake
file(STRINGS "${SOURCE}" line REGEX "^// expect( in the first error)?: " LIMIT_COUNT 1)
string(REGEX REPLACE "^// expect[a-z ]*: " "" expected "${line}")
if(expected STREQUAL "")
  message(FATAL_ERROR "${SOURCE} has no line '// expect: <text of the error>'")
endif()
string(REPLACE "|" ";" INCLUDES "${INCLUDES}")
list(REMOVE_ITEM INCLUDES "" /usr/include)  # has its place in the search path already
list(TRANSFORM INCLUDES PREPEND "-I")
execute_process(COMMAND ${CXX} -std=c++20 -fsyntax-only ${INCLUDES} "${SOURCE}"
                RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
if(status EQUAL 0)
  message(FATAL_ERROR "${SOURCE} compiles, and should not")
endif()
if(line MATCHES "^// expect in the first error: ")
  # Without the compiler's sentence there is nothing to look in.
  string(REGEX MATCH "error: [^\n]*" output "${output}")
endif()
string(FIND "${output}" "${expected}" found)
if(found EQUAL -1)
  message(FATAL_ERROR "${SOURCE} is refused without saying '${expected}':\n${output}")
endif()
