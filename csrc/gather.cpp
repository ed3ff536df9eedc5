#include "gather.h"
