# SPDX-License-Identifier: Apache-2.0
#
# Checks that the scripts in SCRIPTS can read what PROGRAM writes. A file compared with itself has
# only ratios of 1, the table of goals finds its cases, and a file of another kind is refused by
# name.
set(results "${FOLDER}/attention_cpu_tables.json")
function(run out)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE status OUTPUT_VARIABLE printed ERROR_VARIABLE complaint)
  set(${out} "status ${status}\n${printed}\n${complaint}" PARENT_SCOPE)
endfunction()
function(expect text what)
  if(NOT text MATCHES "${what}")
    message(FATAL_ERROR "no '${what}' in:\n${text}")
  endif()
endfunction()

run(text "${PROGRAM}" --smoke --filter "(decode|prefill)/(bf16|int4|retrieval)/32x8" --json "${results}")
expect("${text}" "status 0")
run(text "${PYTHON}" "${SCRIPTS}/compare.py" "${results}" "${results}")
expect("${text}" "status 0")
expect("${text}" "decode/int4/32x8/4Ki/threads:1 [^\n]* \\(1\\.00\\)")
expect("${text}" "decode/bf16 . [12] . 1\\.00")
run(text "${PYTHON}" "${SCRIPTS}/targets_cpu.py" "${results}")
expect("${text}" "appending and quantising, of a decode step [^\n]*%[^\n]*(met|missed)")
expect("${text}" "duo, sparsity 0.5 [^\n]* not measured")
run(text "${PYTHON}" "${SCRIPTS}/compare.py" "${results}" "${CMAKE_CURRENT_LIST_FILE}")
expect("${text}" "status 1\n.*tables.cmake cannot be read")
