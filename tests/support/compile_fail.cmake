# SPDX-License-Identifier: Apache-2.0
#
# Tests code that must not compile: passes if the compiler refuses SOURCE with an error that contains the text
# of the source's line `// expect: <text>`. Run as:
#   cmake -DCXX=<compiler> -DINCLUDES=<folder|folder> -DSOURCE=<file> -P compile_fail.cmake
file(STRINGS "${SOURCE}" expected REGEX "^// expect: " LIMIT_COUNT 1)
string(REPLACE "// expect: " "" expected "${expected}")
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
string(FIND "${output}" "${expected}" found)
if(found EQUAL -1)
  message(FATAL_ERROR "${SOURCE} is refused without saying '${expected}':\n${output}")
endif()
