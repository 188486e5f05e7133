# SPDX-License-Identifier: Apache-2.0
#
# Runs PROGRAM with results falsified by --spoil SPOIL. Every case must be refused, and the program
# must fail. A wrong row count only shows in decode cases.
set(filter decode)
if(NOT SPOIL STREQUAL "rows")
  set(filter .)
endif()
execute_process(COMMAND "${PROGRAM}" --smoke --spoil ${SPOIL} --filter ${filter}
                RESULT_VARIABLE status OUTPUT_VARIABLE printed ERROR_VARIABLE complaint)
string(REGEX MATCHALL "/threads:[0-9]+ " cases "${printed}")  # not lines of errors: they have a comma
string(REGEX MATCHALL "SKIPPED" refused "${printed}")
list(LENGTH cases case_count)
list(LENGTH refused refused_count)
if(NOT status STREQUAL 1 OR case_count LESS 10 OR NOT case_count EQUAL refused_count)
  message(FATAL_ERROR "falsified (${SPOIL}), ${refused_count} of ${case_count} cases were refused "
                      "and the status was ${status}\n${printed}\n${complaint}")
endif()
message(STATUS "all ${case_count} cases were refused")
