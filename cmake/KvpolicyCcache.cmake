# SPDX-License-Identifier: Apache-2.0
#
# Our own builds compile by way of ccache, where there is one. A target takes its launcher when it is made, so this comes
# before all of them.
find_program(KVPOLICY_CCACHE ccache)
if(PROJECT_IS_TOP_LEVEL AND KVPOLICY_CCACHE)
  foreach(language CXX CUDA)
    if(NOT CMAKE_${language}_COMPILER_LAUNCHER)
      # Checkouts of the project give each other what they compiled: paths within one are taken as relative.
      set(CMAKE_${language}_COMPILER_LAUNCHER
          ${CMAKE_COMMAND} -E env "CCACHE_BASEDIR=${PROJECT_SOURCE_DIR}" CCACHE_NOHASHDIR=1 "${KVPOLICY_CCACHE}")
    endif()
  endforeach()
endif()
