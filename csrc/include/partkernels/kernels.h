#pragma once
#include "partkernels/cuda.h"  // what this header is called now
