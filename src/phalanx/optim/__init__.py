"""What happens around an optimizer's step: averaging of models, local SGD."""
