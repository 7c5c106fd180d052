"""One module for each kind of device, named as `runtime.device` names it; each has its `KIND`. None imports torch."""
