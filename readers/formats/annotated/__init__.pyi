from .annotated_format import AnnotatedFormat as AnnotatedFormat
