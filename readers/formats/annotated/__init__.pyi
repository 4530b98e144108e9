from .voc_format import VOC_CLASSES as VOC_CLASSES
