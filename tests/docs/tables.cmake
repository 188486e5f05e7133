# SPDX-License-Identifier: Apache-2.0
#
# Checks that bench/tables.py --check fails and shows the line if a cell of a page differs from its JSON, a
# row or a marker is missing, or a marker has no table.
#   cmake -DPYTHON=<python3> -DSOURCE_DIR=<repository> -DWORK=<folder> -P tables.cmake
set(results "${SOURCE_DIR}/bench/results")

# check(STATUS OUTPUT [arguments...]): compares the pages in WORK with the JSON in `results`.
function(check status output)
  execute_process(COMMAND "${PYTHON}" "${SOURCE_DIR}/bench/tables.py" --check --root "${WORK}" --results "${results}" ${ARGN}
                  RESULT_VARIABLE code OUTPUT_VARIABLE printed ERROR_VARIABLE complaint)
  set(${status} "${code}" PARENT_SCOPE)
  set(${output} "${printed}${complaint}" PARENT_SCOPE)
endfunction()

# refuses(PAGE [FROM TO SAYS]...): with the first FROM of PAGE replaced by TO the check must fail and print SAYS; several
# at once, because a page with many tables takes seconds.
function(refuses page)
  set(text_file "${WORK}/${page}")
  file(READ "${SOURCE_DIR}/${page}" text)
  set(changed "${text}")
  set(expected)
  set(rest ${ARGN})
  while(rest)
    list(POP_FRONT rest from to says)
    string(FIND "${changed}" "${from}" at)
    if(at EQUAL -1)
      message(FATAL_ERROR "${page} has no '${from}' to change")
    endif()
    string(LENGTH "${from}" length)
    math(EXPR after "${at} + ${length}")
    string(SUBSTRING "${changed}" 0 ${at} head)
    string(SUBSTRING "${changed}" ${after} -1 tail)
    set(changed "${head}${to}${tail}")
    list(APPEND expected "${says}")
  endwhile()
  file(WRITE "${text_file}" "${changed}")
  check(status output --page "${page}")
  foreach(says IN LISTS expected)
    string(FIND "${output}" "${says}" found)
    if(status EQUAL 0 OR found EQUAL -1)
      message(FATAL_ERROR "${page}: status ${status}, and no '${says}' in:\n${output}")
    endif()
  endforeach()
  file(WRITE "${text_file}" "${text}")
endfunction()

file(REMOVE_RECURSE "${WORK}")
foreach(page README.md CONTRIBUTING.md docs/adoption.md docs/distributed.md docs/install.md docs/performance.md docs/results.md docs/serving.md docs/triforce.md)
  file(READ "${SOURCE_DIR}/${page}" text)
  file(WRITE "${WORK}/${page}" "${text}")
endforeach()
# As they are they pass: docs.tables says so.
refuses(docs/performance.md
        "x over our bfloat16" "x, 7.7 ms" "-| int8 decode"
        ": met |" ": **missed** |" "-| bf16 decode")
refuses(docs/performance.md "<!-- /cpu_goals -->\n" "" "<!-- cpu_goals -->")
refuses(docs/results.md
        "| full | " "| full | 1" "-| full | 1"
        "| DuoAttention, 50 %" "| DuoAttention, 50 %|" "-| DuoAttention, 50 %|"
        "| SnapKV |" "| SnapKV | 9" "-| SnapKV | 9")
refuses(CONTRIBUTING.md "| in all | " "| in all | 1" "-| in all | 1")
refuses(docs/adoption.md "55 lines changed" "5 lines changed" "-SmolLM2-135M-Instruct")
refuses(docs/triforce.md
        "| quotes the text |" "| quotes another |" "quotes another |"
        "| same rows | 1.000 |" "| same rows | 0.999 |" "same rows | 0.999")
refuses(README.md "times smaller" "times larger" "times larger")
refuses(README.md "<!-- /demo -->" "<!-- /demo -->\n<!-- other -->\n<!-- /other -->" "no table is called other")
set(results "${WORK}/none")
check(status output)
if(status EQUAL 0 OR NOT output MATCHES "which is not there")
  message(FATAL_ERROR "without the JSON: status ${status}\n${output}")
endif()
