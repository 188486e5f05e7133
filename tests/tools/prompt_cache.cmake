# SPDX-License-Identifier: Apache-2.0
#
# Runs PROGRAM twice with the prompt cache FILE: the first run reads the prompt and saves it, the second
# loads it, and both continue with the same text.
#   cmake -DPROGRAM=<save_load> -DFILE=<path> -P prompt_cache.cmake
file(REMOVE "${FILE}")
foreach(run first second)
  execute_process(COMMAND "${PROGRAM}" "${FILE}" RESULT_VARIABLE status OUTPUT_VARIABLE ${run}
                  ERROR_VARIABLE errors)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "the ${run} run ended with ${status}:\n${${run}}${errors}")
  endif()
  if(${run} MATCHES "skipped: the shipped model")
    message("${${run}}")
    return()
  endif()
  string(REGEX MATCH "goes on with: .*" ${run}_text "${${run}}")
endforeach()
file(REMOVE "${FILE}")
if(NOT first MATCHES "there is no such file.*\nread 4096 tokens.*\nsaved " OR NOT second MATCHES "^loaded 4096 tokens")
  message(FATAL_ERROR "expected to read and save, then to load:\n${first}${second}")
endif()
if(first_text STREQUAL "" OR NOT first_text STREQUAL second_text)
  message(FATAL_ERROR "these differ:\n${first_text}${second_text}")
endif()
