# SPDX-License-Identifier: Apache-2.0
#
# Runs every case of SHAPES, SHIPPED and MODEL in small sizes, and makes the tables of docs/triforce.md
# from the results, in FOLDER. Without measurements the page must not change.
file(REMOVE_RECURSE "${FOLDER}")
file(MAKE_DIRECTORY "${FOLDER}")
function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE status OUTPUT_VARIABLE printed ERROR_VARIABLE printed)
  if(NOT status EQUAL 0 OR printed MATCHES "ERROR OCCURRED")
    message(FATAL_ERROR "status ${status} of ${ARGN}:\n${printed}")
  endif()
endfunction()
set(page "${SOURCE_DIR}/docs/triforce.md")
set(tables "${PYTHON}" "${SOURCE_DIR}/bench/tables.py" --results "${FOLDER}" --page docs/triforce.md)

run(${tables} --out "${FOLDER}/unmeasured.md")
file(READ "${page}" before)
file(READ "${FOLDER}/unmeasured.md" after)
if(NOT before STREQUAL after)
  message(FATAL_ERROR "without measurements ${page} came out changed")
endif()

run("${SHAPES}" --smoke "--benchmark_out=${FOLDER}/triforce_shapes.json" --benchmark_out_format=json)
run("${SHIPPED}" --smoke "--benchmark_out=${FOLDER}/triforce_shipped.json" --benchmark_out_format=json)
run("${MODEL}" --smoke "--benchmark_out=${FOLDER}/model.part" --benchmark_out_format=json)
run("${MODEL}" --smoke --benchmark_filter=ngram "--benchmark_out=${FOLDER}/again.part" --benchmark_out_format=json)
set(keep "${PYTHON}" "${SOURCE_DIR}/bench/keep_results.py" --add "${FOLDER}/triforce_model.json")
run(${keep} "${FOLDER}/model.part")
run(${keep} "${FOLDER}/again.part")
file(READ "${FOLDER}/triforce_model.json" kept)
string(REGEX MATCHALL "\"name\": \"structure/ngram/repeats/" found "${kept}")
list(LENGTH found count)
if(NOT count EQUAL 1 OR kept MATCHES "host_name" OR NOT kept MATCHES "attention/means/kjv/256/64")
  message(FATAL_ERROR "bench/keep_results.py kept ${count} cases of a name, a host or too few cases:\n${kept}")
endif()
run(${tables} --out "${FOLDER}/triforce.md")
file(READ "${FOLDER}/triforce.md" made)
foreach(row "0[.]923 . 0[.]35 . 6 . " "0[.]923 . no small draft . 11 . "
            "`triforce` . goes on with a text . 0[.]6 . " "`ngram` . answers questions about it . 0 . "
            "`self-4` . quotes the text . kjv . 0 . 256 . " "budget 64 . kjv . " "chunk 4 . "
            "kjv . 256 . 64 . 0[.]250 . " "kjv . 256 . 64 . attention . ")
  if(NOT made MATCHES "${row}")
    message(FATAL_ERROR "no '${row}' in ${FOLDER}/triforce.md")
  endif()
endforeach()
