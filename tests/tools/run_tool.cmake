# SPDX-License-Identifier: Apache-2.0
#
# Runs PROGRAM with ARGS and checks STATUS, JSON, PRINTS and ERROR; CMakeLists.txt explains them.
execute_process(COMMAND "${PROGRAM}" ${ARGS} RESULT_VARIABLE status OUTPUT_VARIABLE printed
                ERROR_VARIABLE complaint INPUT_FILE /dev/null)
function(fail why)
  message(FATAL_ERROR "${why}\nstatus: ${status}\nstdout:\n${printed}\nstderr:\n${complaint}")
endfunction()

if(NOT status STREQUAL STATUS)
  fail("the exit status must be ${STATUS}")
endif()
foreach(key IN LISTS JSON)
  string(JSON ignored ERROR_VARIABLE wrong GET "${printed}" "${key}")
  if(wrong)
    fail("stdout must be JSON with a member '${key}': ${wrong}")
  endif()
endforeach()
if(PRINTS AND NOT printed MATCHES "${PRINTS}")
  fail("stdout must match '${PRINTS}'")
endif()
if(ERROR)
  if(NOT complaint MATCHES "${ERROR}")
    fail("stderr must match '${ERROR}'")
  endif()
  if(NOT printed STREQUAL "")
    fail("an error belongs on stderr alone")
  endif()
endif()
