# Installs a build tree into an empty folder and moves it; examples/cpp, copied as a separate project, must find it
# there, build and run. CMakeLists.txt registers this test and passes its variables.
cmake_minimum_required(VERSION 3.24)
set(work ${BUILD}/package)
set(given -G ${GENERATOR} -D CMAKE_MAKE_PROGRAM=${MAKE_PROGRAM} -D CMAKE_CXX_COMPILER=${COMPILER}
          -D CMAKE_CXX_FLAGS=${FLAGS} -D CMAKE_BUILD_TYPE=${BUILD_TYPE} -D CMAKE_PREFIX_PATH=${work}/moved)

function(run)
  execute_process(COMMAND ${ARGV} COMMAND_ECHO STDOUT COMMAND_ERROR_IS_FATAL ANY)
endfunction()

file(REMOVE_RECURSE ${work})
run(${CMAKE_COMMAND} --install ${BUILD} --config ${BUILD_TYPE} --prefix ${work}/installed)
file(RENAME ${work}/installed ${work}/moved)
file(COPY ${CMAKE_CURRENT_LIST_DIR}/../../examples/cpp DESTINATION ${work})
run(${CMAKE_COMMAND} -S ${work}/cpp -B ${work}/build ${given})
run(${CMAKE_COMMAND} --build ${work}/build --config ${BUILD_TYPE})

# The examples compare their results with the definition.
run(${EMULATOR} ${work}/build/subnetwork_matmul)
if(cuda IN_LIST COMPONENTS)
  foreach(example matmul_gpu with_cublas)
    if(example STREQUAL matmul_gpu OR EXISTS ${work}/build/subnetwork_${example})  # cuBLAS is optional
      execute_process(COMMAND ${work}/build/subnetwork_${example} RESULT_VARIABLE result)
      if(NOT result EQUAL 0 AND NOT result EQUAL 77)  # 77: there is no GPU
        message(FATAL_ERROR "subnetwork_${example}: ${result}")
      endif()
    endif()
  endforeach()
endif()

# A missing component is an error that explains the fix, and so is another minor version, which may use other names.
function(refused name arguments reason)
  file(WRITE ${work}/${name}/CMakeLists.txt "cmake_minimum_required(VERSION 3.24)\nproject(${name} LANGUAGES CXX)\n"
    "find_package(partkernels ${arguments})\n")
  execute_process(COMMAND ${CMAKE_COMMAND} -S ${work}/${name} -B ${work}/${name}/build ${given}
                  RESULT_VARIABLE result ERROR_VARIABLE said OUTPUT_QUIET)
  string(REGEX REPLACE "[ \n]+" " " said "${said}")
  if(result EQUAL 0 OR NOT said MATCHES "${reason}")
    message(FATAL_ERROR "asked for ${arguments}, find_package said: ${said}")
  endif()
endfunction()
refused(absent "REQUIRED COMPONENTS cpu npu" "no component npu here: it was built with")
refused(older "0.2 REQUIRED" "compatible with requested version")
